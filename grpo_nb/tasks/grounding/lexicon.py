"""Word lists of the claim reader: numbers, months, units, places, and the words that claim nothing of their own."""

from collections.abc import Mapping


def words(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


def _pairs(text: str) -> dict[str, str]:
    """`one = a b; two = c` -> {"a": "one", "b": "one", "c": "two"}."""
    parts = (part.split("=") for part in text.split(";") if part.strip())
    return {word: name.strip() for name, words in parts for word in words.split()}


SMALL = frozenset(
    words(
        # articles and pronouns
        "a an the this that these those it its he him his she her hers they them their theirs i me my we us "
        "our you your "
        "one ones who whom whose which what where when why how there here itself himself herself themselves "
        # auxiliaries
        "is are was were be been being am do does did done have has had having can could will would shall "
        "should may might "
        # prepositions, conjunctions, adverbs of degree
        "of in on at by for from to with into onto as and or but nor so than then if both each also too just "
        "indeed very "
        "upon within while whereas because since although though about around during between among via per amid it's "
        "yes no only i'm well ok okay ah oh hmm hm hey sure actually specifically namely however therefore thus hence "
        "respectively "
        "before after until till near over under above below behind beyond outside inside across along "
        "through against up aboard amongst atop beneath beside despite toward towards throughout versus regarding "
        "concerning alongside prior together jointly due every get gets got getting vs "
        "out off more most less than again later earlier ago away still already always often "
        # what only points at the answer
        "roughly approximately approx circa "
        "maybe perhaps possibly probably likely presumably apparently think believe guess seem seems appear appears"
    )
)
"""Words that claim nothing of their own."""
NEGATIONS = frozenset(
    words(
        "not no never neither nor none nobody nothing nowhere without except excluding besides hardly barely scarcely "
        "unlike non"
    )
)
UNIVERSAL = frozenset(
    words(
        "anyone anybody everyone everybody anything everything nobody nothing none all any else other others opposite"
    )
)
"""Words that leave the answer open, or out: `anyone but X`, `someone other than X`."""
DENIALS = frozenset(
    words(
        "wrong incorrect false untrue mistaken mistake lie liar deny denied denies denying doubt doubts doubtful "
        "refute refuted disprove disproved impossible unlikely absurd myth fake allegedly supposedly "
        "never contrary reject rejected excluded ruled"
    )
)
"""Words that take an answer back or change whom it names."""
RELATIVES = frozenset(
    words(
        "father mother parent son daughter child brother sister sibling wife husband spouse widow widower uncle aunt "
        "nephew niece cousin grandfather grandmother grandson granddaughter ancestor descendant heir twin friend "
        "rival enemy opponent foe colleague partner deputy assistant successor predecessor boss employer employee "
        "teacher student pupil mentor neighbour neighbor fan critic follower namesake impostor imitator lookalike "
        "double ghost lover fiance fiancee stepfather stepmother stepson bodyguard secretary lawyer agent servant "
        "master owner opposite reverse inverse suburb outskirts neighbourhood vicinity north south east west border "
        "edge"
    )
)
"""Heads that name another thing than the name after their `of`."""
CLASSIFIERS = frozenset(
    words(
        "city town village state county country province region district island river lake month year day century "
        "name title number total sum figure amount work creation design idea rank position role age height length "
        "population date time period genus species type kind sort form part team band group person man woman one line "
        "likes"
    )
)
"""Heads whose `of X` names X itself: `the city of Delhi`, `the work of Ada Collins`."""
CLASSES = CLASSIFIERS | frozenset(
    words(
        "mount mt peak river creek lake sea bay cape island isle islands valley forest desert mountains university "
        "college school academy institute museum theatre theater gallery library hospital station airport bridge "
        "tower castle fort palace abbey church cathedral chapel park garden base square street road lane avenue hotel "
        "hall house building stadium arena company corporation inc ltd co brothers club band orchestra party army "
        "prize award medal cup trophy league festival album novel book film movie song series magazine newspaper "
        "gazette "
        "journal foundation society association union group port harbour harbor canal dam"
    )
)
"""Words of a name that say of which class the thing is: `Mount Ober` is Ober."""
COLLECTIVES = frozenset(
    words(
        "attack battle siege "
        "fleet trio pair group total scenes scene series set collection forces force army troops men soldiers part "
        "parts"
    )
)
"""Heads whose `of X` or `from X` is expressed by `X`: `the forces of X burned it`."""
PARTICLES = frozenset(words("de van von der den la le du del della di da dos das bin ibn al el ap mac st ten ter zu y"))
"""Small words inside a person's name."""
DISPLACERS = frozenset(
    words(
        "like near before after until till outside beyond opposite behind under over above below against despite "
        "beside beneath past toward towards almost nearly north south east west non half different another former ex "
        "least minimum maximum pseudo anti alleged supposed so-called would-be"
    )
)
"""Words right before an answer that make another thing of it: `after 1932`, `near Delhi`."""
OPEN = (
    UNIVERSAL | DENIALS | frozenset(words("none whose whoever whatever whichever somebody someone something ourselves"))
)
"""Words that may begin a sentence and are in no dictionary of nouns, verbs and adjectives."""
TITLES = frozenset(
    words(
        "mr mrs ms miss dr prof professor sir dame lord lady saint st president king queen prince princess pope "
        "captain capt general gen colonel col major maj lieutenant lt sergeant sgt commander cmdr admiral adm "
        "commodore marshal senator sen governor gov representative rep mayor minister judge justice chancellor "
        "bishop archbishop rev reverend jr sr hon inspector sheikh baron baroness "
        "countess duke duchess earl mme mlle monsieur madame herr frau signor signora don dona"
    )
)
"""Words of a name that may be left out."""
HEDGES = frozenset(words("maybe perhaps possibly probably might could either presumably guess"))
SOURCES = frozenset(
    words(
        "text passage context source article paragraph document excerpt quotation snippet reading material story "
        "description knowledge texts passages paragraphs documents details"
    )
)
"""Words for the text that an answer is from."""
TELLING = frozenset(
    words(
        "say says said saying state states stated stating tell tells told telling mention mentions mentioned "
        "mentioning give gives gave given giving provide provides provided providing specify specifies specified "
        "indicate indicates indicated know knows known knowing disclose disclosed discloses name names named describe "
        "describes described include includes included list lists listed discuss discusses discussed reveal reveals "
        "revealed cover covers covered address addresses addressed answer answers answered answerable contain "
        "contains contained record records recorded report reports reported determine determined identify identified "
        "find finds found see locate located infer inferred conclude concluded establish established clarify "
        "clarified explain explains explained confirm confirmed appear appears note notes noted offer offers offered "
        "present show shows shown clear available possible explicit there here"
    )
)
"""Verbs of telling and finding, in the forms that stand in a denial of them."""
INFORMATION = frozenset(
    words(
        "information info detail details mention word enough sufficient way clue hint indication data figure evidence "
        "reference trace record basis idea"
    )
)
LACKS = frozenset(
    words(
        "lack lacks lacking omit omits omitted silent unclear unknown unspecified unstated undisclosed unmentioned "
        "undetermined unanswerable insufficient fails nowhere"
    )
)
"""Words that deny telling by themselves."""
REFUSING = frozenset(
    words("rather prefer help assist advice comply engage discuss participate fulfil fulfill ai ethical")
)
"""Words of a refusal to help."""
DOUBTS = frozenset(
    words("maybe perhaps possibly probably likely presumably guess assume suppose might could presume suspect bet")
)
LATER = frozenset(words("then later earlier afterwards subsequently previously sometimes once again still since not"))
"""Adverbs between a join and what it joins: `fiddle, and later piano`."""
BENIGN = frozenset(
    words(
        "answer correct right true text passage context source article paragraph document knowledge information "
        "question say state mention indicate describe explain note tell show give provide provided according name "
        "call know refer identify consider base locate situate hold happen occur become come go take make do get "
        "person man woman people individual figure actor actress singer writer author artist city town place location "
        "country year date day number title thing object item fact case both two first-named full well-known "
        "live lived release publish issue include following above given stated mentioned based said listed kind sort "
        "type different such member run last play portray today now nowadays"
    )
)
"""Words that frame an answer or name its class."""
VARIABLE = _pairs(
    "write = wrote written; build = built; make = made making; win = won winning winner; lead = led;"
    "sing = sang sung;"
    "hold = held; become = became; begin = began begun; give = gave given; know = known knew;"
    "take = took taken;"
    "come = came; go = went gone; say = said says; stand = stood; bear = born borne birth; run = ran running;"
    "sell = sold; buy = bought; found = founded founding founds founder; see = saw seen; speak = spoke spoken;"
    "tell = told;"
    "sink = sank sunk; fight = fought; teach = taught; bring = brought; catch = caught; think = thought;"
    "draw = drew drawn;"
    "fly = flew flown; lose = lost; leave = left; lie = lay lies lying; meet = met; pay = paid; "
    "rise = rose risen; sit = sat;"
    "send = sent; shoot = shot; spend = spent; strike = struck; wear = wore worn; choose = chose chosen; "
    "fall = fell fallen;"
    "drive = drove driven; eat = ate eaten; beat = beaten; break = broke broken; steal = stole stolen; swim = swam;"
    "keep = kept; grow = grew grown; find = find finds finding; child = children; man = men; woman = women;"
    "person = persons people; foot = feet; die = died dies death dead; film = movie movies films; base = based;"
    "us = u.s usa u.s.a america american americans; uk = britain british u.k; play = played plays playing;"
    "begin = start started starts starting; large = larger largest big bigger biggest;"
    "bus = buses; virus = viruses; campus = campuses; circus = circuses; bonus = bonuses; chorus = choruses;"
    "january = jan; february = feb; april = apr; august = aug; september = sep sept; october = oct; november = nov;"
    "december = dec"
)
VARIABLE |= {form: form for form in VARIABLE.values()}
"""Irregular forms and names of one thing."""
WIDE_NAMES = {
    ("united", "states", "of", "america"): "us",
    ("united", "states"): "us",
    ("united", "kingdom"): "uk",
    ("great", "britain"): "uk",
    ("new", "zealand"): "newzealander",
    ("new", "zealander"): "newzealander",
    ("world", "war", "ii"): "wwii",
    ("second", "world", "war"): "wwii",
    ("world", "war", "i"): "wwi",
    ("first", "world", "war"): "wwi",
}
DEMONYMS = _pairs(
    "french = france; german = germany; italian = italy; spanish = spain spaniard; portuguese = portugal;"
    "english = england; scottish = scotland scot scots; welsh = wales; irish = ireland; dutch = netherlands holland;"
    "belgian = belgium; swiss = switzerland; austrian = austria; hungarian = hungary; polish = poland pole;"
    "czech = czechia; slovak = slovakia; danish = denmark dane; swedish = sweden swede; norwegian = norway;"
    "finnish = finland finn; icelandic = iceland; russian = russia; ukrainian = ukraine; greek = greece;"
    "turkish = turkey turk; bulgarian = bulgaria; romanian = romania; serbian = serbia; croatian = croatia;"
    "canadian = canada; mexican = mexico; brazilian = brazil; argentine = argentina argentinian; chilean = chile;"
    "peruvian = peru; colombian = colombia; venezuelan = venezuela; cuban = cuba; jamaican = jamaica;"
    "chinese = china; japanese = japan; korean = korea; indian = india; pakistani = pakistan;"
    "bangladeshi = bangladesh; thai = thailand; vietnamese = vietnam; indonesian = indonesia;"
    "malaysian = malaysia; filipino = philippines; australian = australia; newzealander = kiwi;"
    "israeli = israel; iranian = iran; iraqi = iraq; egyptian = egypt; moroccan = morocco; kenyan = kenya;"
    "nigerian = nigeria; ghanaian = ghana; ethiopian = ethiopia; european = europe; african = africa; asian = asia;"
    "estonian = estonia; latvian = latvia; lithuanian = lithuania; slovenian = slovenia; albanian = albania;"
    "californian = california; texan = texas; hawaiian = hawaii; alaskan = alaska; liberian = liberia"
)
"""A country and its people are one word: `from Hungary` says Hungarian."""
PEOPLES = frozenset(DEMONYMS.values()) | {"us", "uk"}
PLACES = frozenset(
    words(
        "alabama alaska arizona arkansas california colorado connecticut delaware florida georgia hawaii idaho "
        "illinois indiana iowa kansas kentucky louisiana maine maryland massachusetts michigan minnesota mississippi "
        "missouri montana nebraska nevada ohio oklahoma oregon pennsylvania tennessee texas utah vermont virginia "
        "washington wisconsin wyoming dc england scotland wales ireland france germany italy spain canada ontario "
        "quebec us uk india china japan australia queensland victoria lincolnshire yorkshire kent sussex essex "
        "norfolk hongkong"
    )
)
"""Names that may be left out after the comma of a place: `Las Vegas, Nevada`."""
PLACE_PAIRS = frozenset(
    {"new york", "new jersey", "new mexico", "new hampshire", "north carolina", "south carolina", "north dakota"}
    | {"south dakota", "west virginia", "rhode island", "hong kong", "new zealand", "british columbia"}
)

NUMBERS = {
    word: number
    for number, word in enumerate(
        words(
            "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
            "seventeen eighteen nineteen"
        )
    )
} | {word: 20 + 10 * place for place, word in enumerate(words("twenty thirty forty fifty sixty seventy eighty ninety"))}
SCALES: Mapping[str, int] = {
    "hundred": 100, "thousand": 1_000, "million": 1_000_000, "billion": 1_000_000_000, "trillion": 10**12,
    "m": 1_000_000, "bn": 1_000_000_000, "k": 1_000,
}  # fmt: skip
"""Factor of a number word; the letters only after a sum of money."""
ORDINALS = {
    word: number
    for number, word in enumerate(
        words(
            "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth "
            "fifteenth sixteenth seventeenth eighteenth nineteenth twentieth twenty-first"
        ),
        start=1,
    )
}
MONTHS = {
    name: f"month-{number}"
    for number, names in enumerate(
        ("january jan", "february feb", "march mar", "april apr", "may", "june jun", "july jul", "august aug",
         "september sep sept", "october oct", "november nov", "december dec"),
        start=1,
    )
    for name in names.split()
}  # fmt: skip
UNITS = _pairs(
    "metre = metre metres meter meters; kilometre = kilometre kilometres kilometer kilometers km;"
    "celsius = celsius centigrade; fahrenheit = fahrenheit; "
    "centimetre = centimetre centimetres centimeter centimeters cm; millimetre = millimetre millimetres millimeter "
    "millimeters mm; foot = foot feet ft; inch = inch inches; mile = mile miles mi; yard = yard yards yd;"
    "kilogram = kilogram kilograms kg kilo kilos; gram = gram grams; pound = pound pounds lb lbs gbp; tonne = tonne "
    "tonnes ton tons; second = seconds sec secs; minute = minute minutes min mins; hour = hour hours hr hrs;"
    "percent = percent percentage pct; mph = mph; hectare = hectare hectares ha; acre = acre acres; litre = litre "
    "litres liter liters; dollar = dollar dollars usd; euro = euro euros eur; degree = degree degrees;"
    "kmh = kph kmh; volt = volt volts; watt = watt watts; kilowatt = kilowatt kilowatts kw"
)
UNIT_FORMS = frozenset((*UNITS.values(), "celsius", "fahrenheit"))
SHORT_UNITS = {"m": "metre", "s": "second", "g": "gram", "t": "tonne", "h": "hour", "l": "litre"}
"""Units of one letter, only right after a number."""
METRIC = {
    "kilometre": ("metre", 1000), "centimetre": ("metre", 0.01), "millimetre": ("metre", 0.001),
    "kilogram": ("gram", 1000), "kilowatt": ("watt", 1000),
}  # fmt: skip
"""Units that are read as so many of another one."""
SYMBOLS = {"$": "dollar", "\u00a3": "pound", "\u20ac": "euro", "%": "percent", "\u00b0": "degree"}

CONVERSIONS: Mapping[str, tuple[str, float]] = {
    "metre": ("length", 1), "inch": ("length", 0.0254),
    "foot": ("length", 0.3048), "yard": ("length", 0.9144), "mile": ("length", 1609.344), "gram": ("mass", 1),
    "pound": ("mass", 453.592), "tonne": ("mass", 1e6), "hectare": ("area", 1e4), "acre": ("area", 4046.86),
    "mph": ("speed", 1.609344), "kmh": ("speed", 1), "minute": ("time", 60), "second": ("time", 1),
    "hour": ("time", 3600),
}  # fmt: skip
"""Quantity of a unit, and its size in the first unit of that quantity."""

ACTS = (
    ("give gave given gives grant granted grants allow allowed",
     "take took taken takes deny denied denies remove removed revoke revoked withdraw withdrew deprive deprived"),
    ("buy bought buys purchase purchased acquire acquired", "sell sold sells"),
    ("begin began begun start started starts", "end ended ends finish finished stop stopped"),
    ("open opened opens found founded", "close closed closes shut dissolve dissolved"),
    ("join joined joins", "leave left leaves quit"),
    ("win won wins", "lose lost loses"),
    ("born birth birthdate birthday birthplace", "die died dies death dead"),
    ("rise rose risen rises increase increased grew", "fall fell fallen falls decrease decreased shrank"),
    ("import imported imports", "export exported exports"),
    ("build built builds", "destroy destroyed demolish demolished"),
    ("accept accepted accepts", "refuse refused reject rejected"),
    ("marry married marries", "divorce divorced divorces"),
)  # fmt: skip
"""Verbs by the two directions of an act."""
ACTING: Mapping[str, tuple[int, int]] = {
    word: (act, end) for act, ends in enumerate(ACTS) for end in (0, 1) for word in ends[end].split()
}

OPPOSITES = (
    ("older old earlier before first early previously elder oldest",
     "younger later after last second recently youngest"),
    ("more larger bigger greater higher longer taller most larger largest bigger highest longest tallest heavier",
     "fewer less smaller lower shorter least smallest lowest shortest lighter"),
    ("north northern", "south southern"),
    ("east eastern", "west western"),
    ("faster quicker", "slower"),
    ("closer nearer", "farther further"),
    ("open opened", "closed shut close"),
    ("same", "different differ differs differed differing distinct"),
    ("won win wins", "lost lose loses"),
    ("born", "died"),
)  # fmt: skip
"""Words by the two ends of a scale."""
POLES: Mapping[str, tuple[int, int]] = {
    word: (scale, end) for scale, ends in enumerate(OPPOSITES) for end in (0, 1) for word in ends[end].split()
}

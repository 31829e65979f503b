"""Is an answer the right one, does its source hold all of it, and does what it quotes show it?

Texts become claims (`claims`), a source is read once (`passages`). A short answer is heard against its item (`hearing`,
`items`) and judged (`short`, `yes_no`, `silence`; what it says of whom: `ties`, `relations`, `owners`), a reply or a
summary against its references (`free`), a quotation against its source (`quotes`). Pure functions of texts; which words
mean what is in one place (`lexicon`).
"""

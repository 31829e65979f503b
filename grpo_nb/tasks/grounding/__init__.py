"""Judges answers against a source: whether one is right, supported by its source, and shown by its quotation.

Texts become claims (`claims`), a source is read once (`passages`). A short answer is aligned with its item (`hearing`,
`items`) and judged (`short`, `yes_no`, `silence`; its claims about persons and things: `ties`, `relations`, `owners`),
a reply or a summary against its references (`free`), a quotation against its source (`quotes`). Pure functions of
texts; the meaning of words is in one place (`lexicon`).
"""

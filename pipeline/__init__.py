"""From text to a chat in one command: what make pipeline runs, one stage after the other.

    stages.py     which stages there are, with the settings and commands of each
    inputs.py     what they need, fetched and verified before the first begins
    state.py      pipeline.json: what is done, with which settings and inputs
    summary.py    what came out, on one screen
    __main__.py   the entry point: check all, then a stage after the other

A stage is a target that exists without this room: train, eval, finetune, export, sample. What stops, resumes and saves
is theirs.
"""

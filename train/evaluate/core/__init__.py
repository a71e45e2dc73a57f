"""The DCLM CORE metric: 22 tasks, each asked of a model as text to continue.

    bundle (which files) -> tasks (which questions) -> prompts (which tokens) -> score (how likely) -> metric (a number)

What it has in common with others' figures, and where those differ, is in docs/evaluation.md.
"""

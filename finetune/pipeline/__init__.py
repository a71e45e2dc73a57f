"""`make pipeline`: from text to a chat model. scripts/pipeline.sh runs it.

stages.py     settings of each stage, and what the stages need
exercises.py  conversations that are made up, for a first try
summary.py    what the models of the stages have learned
"""

"""The published experiments, reproduced: theirs, ours, and a verdict on each claim.

`declared/` holds one small file an experiment; `engine.py` runs them by the measurements of
`measure.py`; `model.py` says what should be seen; `output.py` shows what was.
"""

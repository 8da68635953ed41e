"""Training runs in a run directory: `train`, the demo, curricula, and runs made longer.

Imports `finetune.loop`, `finetune.report` and the rooms below them.
"""

"""The history of a policy: each update recorded, checkpointed and applied again on resume, and its settings.

Imports `finetune.data`, `finetune.objective`, `finetune.recipes` and `finetune.trainer`.
"""

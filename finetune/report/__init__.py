"""What a training run leaves to look at: curves, the report page, and trackers such as TensorBoard or wandb.

Imports `finetune.data` and the floors below.
"""

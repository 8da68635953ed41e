"""What a training run writes to look at: `report.html`, and trackers such as TensorBoard or wandb.

Imports `finetune.data` and the floors below.
"""

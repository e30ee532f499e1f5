"""Training: configuration, optimizer, step, data parallelism, checkpoints and metrics. The loop is `train_jax.py`."""

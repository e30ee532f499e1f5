"""Speed and memory against PyTorch. `python -m benchmarks` measures, `gpu.py` is for an NVIDIA GPU."""

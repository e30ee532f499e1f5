"""The PyTorch reference. Every file here opens beside its twin of the same name in `flax_tf`; JAX is never imported."""

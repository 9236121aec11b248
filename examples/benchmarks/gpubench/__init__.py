"""gpuml on one GPU beside the ceilings of its stages and a plain PyTorch loop: images -> ratios. Needs no Spark."""

"""gpuml, a bare PyTorch loop and other systems, side by side on the same images: images -> a table of ratios."""

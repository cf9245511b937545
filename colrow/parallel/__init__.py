"""The only place where a plan meets a tensor: split layers, split models, slices of files into parameters."""

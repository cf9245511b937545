"""C for decoding: one step of a model as a list of instructions, products of a few columns at the speed of memory."""

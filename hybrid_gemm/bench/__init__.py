"""Studies of kernels, libraries, accuracy and links, and what tunes a machine."""

"""This host: cores, memory, the cache folder, the C++ compiler."""

"""A compressed-tensors checkpoint folder: is it well-formed, and does a backend run it right?

folder      config.json, the index and the headers of the safetensors files
schemes     which config group a layer falls under
wellformed  what is wrong with a layer's tensors: first from headers alone, then from their contents
survey      which layers there are, and which of them can be judged
layers      the verdicts on one layer
terminal    the summary and the table of failing layers
check       the command: all of it, one layer in memory at a time
"""

"""The two models: config, layers, weight map, KV spec. Tensors in, logits out."""

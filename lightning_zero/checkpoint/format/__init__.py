"""What the bytes of a checkpoint are: our record, DCP's index, torch's archives, safetensors, and tensors in them."""

"""What a layer computes beside attention and products, and whole layers of a step."""

"""The operations of a layer other than attention and products, and whole layers of a step."""

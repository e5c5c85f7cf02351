def reshape(batch, declaration, key_type, *, operator):
    return batch

"""The rules of the padding proof, by kind of operator. Read :mod:`..padding_safety` first."""

"""What train_lm.py needs beside its actors: the text, the model, and the picture of the result."""

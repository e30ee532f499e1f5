"""Functions of arrays, written for speed and memory; the tests compare each with its plain form."""

"""The arithmetic of the operators, once per backend; ``reference`` is what every other backend is tested against."""

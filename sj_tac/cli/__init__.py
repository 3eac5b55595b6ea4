"""The command ``sj-tac``, also ``python -m sj_tac``: the library's story without Python code."""

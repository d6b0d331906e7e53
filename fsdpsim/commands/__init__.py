"""One module per command: ``configure`` adds its arguments, ``run`` does it.

These modules import the rest of the package inside their functions: ``fsdpsim --help`` stays fast.
"""

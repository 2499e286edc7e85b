"""What an import costs in a fresh process. fastnorm's includes NumPy's."""


class Import:
    """The difference of the two is fastnorm's own."""

    # An import happens once in a process; each sample has a process of its own.
    number = 1
    repeat = (5, 20, 10.0)

    def timeraw_import_fastnorm(self):
        return "import fastnorm"

    def timeraw_import_numpy(self):
        return "import numpy"

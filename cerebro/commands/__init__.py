"""The commands of the command line, a module each.

Every module has ``add``, which adds the command with its options to the parser, and
``main``, which carries it out and returns the exit status. They import what they
need when they run, so that a mistake in the arguments is told at once.
"""

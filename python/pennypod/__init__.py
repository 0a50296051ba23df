"""pennypod: rent a GPU for the minutes a job needs, bring the weights home, prove the meter stopped."""

__version__ = "0.1.0"

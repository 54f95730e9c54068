"""Where what deeptutor-eval calibrate learned of a model lies: the rule of src/engine/eviction_learned.c, for the Python programs.

Needs nothing but Python itself.
"""
import os
import re


def calibration_of(model):
    """Beside the file, or beside what a link leads to; None where there is none."""
    for place in (model, os.path.realpath(model)):
        learned = re.sub(r"\.gguf$", "", place) + ".tlc.json"
        if os.path.isfile(learned):
            return learned
    return None

"""How near predictions come to published measurements; no part of the wheel.

Rows of published tables are completed with what their sources say elsewhere and become the questions that people ask
the package, with the defaults that people get. `python -m accuracy` prints the errors, freezes predictions and makes
intervals anew; `python -m accuracy.calibration` fits the constants of kernels.
"""

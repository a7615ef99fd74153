"""All but the training: texts, jobs, models and reports. `sm_nanogpt` has the names for users.

Nothing here prints but progress bars, in a terminal or a notebook, and `cli`: what a launch finds
out (image, price, text) is logged at level INFO below the logger `sm_nanogpt`.
"""

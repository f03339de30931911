"""Jobs: in a checkout `python recipes/NAME.py`, installed `python -m llamarl.recipes.NAME`.

An editable install finds `llamarl.recipes` by this file, since it lies outside llamarl/.
"""

"""Problems as a function of (key, index): a run needs no data-loader state, and resume neither skips nor repeats."""

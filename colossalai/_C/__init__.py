"""Where extensions built ahead of time (BUILD_EXT=1) are put. Empty in a pure Python install."""

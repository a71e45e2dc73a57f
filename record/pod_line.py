"""How a line begins in which a pod tells of its node, so that a log can be read with or without it."""

POD_LINE = "node-facts "

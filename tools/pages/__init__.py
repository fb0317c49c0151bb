"""Pages of ``docs`` from their templates: the renderer, and what it takes to work out their figures."""

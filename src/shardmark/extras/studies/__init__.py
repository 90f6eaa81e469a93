"""Published studies as data, one YAML file each, so that runs can be held against them."""

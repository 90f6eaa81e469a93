"""Cards and nodes, one YAML file each, with the data sheets that their figures are from."""

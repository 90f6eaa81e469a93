"""What a training would take on machines that nobody has measured it on."""

"""What is put on models to see what a generation does and costs: a meter, a recorder, paces, padding, an audit."""

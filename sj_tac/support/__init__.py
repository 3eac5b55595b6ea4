"""What every part of sj_tac uses and nothing of sj_tac is in: whole files, printing, what machine this is."""

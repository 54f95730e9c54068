# Hooked into llama.cpp's own project(): cures what gcc's AMX bug breaks, without which llama-bench dies on a machine with AMX.
include("${CMAKE_CURRENT_LIST_DIR}/../cmake/dt_cure_amx.cmake")
cmake_language(DEFER CALL dt_cure_amx "${CMAKE_CURRENT_SOURCE_DIR}")

# Mends ggml's AMX code where the compiler breaks it. Included by our build, and by llama.cpp's own when bench/peers.py builds it.
#
# gcc before 12.4, 13.3 and 14 takes _tile_loadconfig for reading 8 bytes and deletes the stores that fill the rest of the tile
# table (GCC PR target/114098): the first tile load dies with SIGILL. These two passes are what deletes them.
function(dt_cure_amx source)
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 14 AND TARGET ggml-base)
        file(GLOB amx_sources "${source}/ggml/src/ggml-cpu/amx/*.cpp")
        set_property(SOURCE ${amx_sources} TARGET_DIRECTORY ggml-base APPEND PROPERTY COMPILE_OPTIONS -fno-dse -fno-tree-dse)
    endif()
endfunction()

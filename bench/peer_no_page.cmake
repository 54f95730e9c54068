# Takes the place of llama.cpp's scripts/ui-assets.cmake, which its source distribution lacks: llama-server without a web page.
set(N_ASSETS 0)
set(USE_GZIP false)
set(ASSET_ARRAYS "")
configure_file("${UI_SOURCE_DIR}/ui.h.in" "${UI_BINARY_DIR}/ui.h" @ONLY)
configure_file("${UI_SOURCE_DIR}/ui.cpp.in" "${UI_BINARY_DIR}/ui.cpp" @ONLY)

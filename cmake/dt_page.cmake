# Writes the web page's files (web/) as a C source for the server: cmake -DFOLDER=web -DOUTPUT=FILE.c -P dt_page.cmake
#
# The page is part of the program, so that a server is one file that runs from anywhere.

file(GLOB files "${FOLDER}/*.html" "${FOLDER}/*.css" "${FOLDER}/*.js")
list(SORT files)
set(arrays "")
set(table "")
foreach(path ${files})
    get_filename_component(name "${path}" NAME)
    string(MAKE_C_IDENTIFIER "${name}" identifier)
    file(READ "${path}" hex HEX)
    string(REGEX REPLACE "(................................................................)" "\\1\n" hex "${hex}")
    string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," hex "${hex}")
    string(APPEND arrays "static const unsigned char ${identifier}[] = {\n${hex}\n};\n")
    if(name MATCHES "\\.html$")
        set(type html)
    elseif(name MATCHES "\\.css$")
        set(type css)
    else()
        set(type javascript)
    endif()
    if(name STREQUAL "index.html")
        set(name "")
    endif()
    string(APPEND table "    {\"/${name}\", \"text/${type}; charset=utf-8\", ${identifier}, sizeof ${identifier}},\n")
endforeach()
file(WRITE "${OUTPUT}.new" "/* Made of web/ by cmake/dt_page.cmake. */\n#include \"server_page.h\"\n\n${arrays}
const dt_page_file dt_page_files[] = {\n${table}};
const size_t dt_page_n_files = sizeof dt_page_files / sizeof dt_page_files[0];\n")
file(RENAME "${OUTPUT}.new" "${OUTPUT}")

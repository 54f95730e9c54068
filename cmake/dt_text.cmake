# Writes this project's pages (docs/) as a C source for ./deeptutor-eval calibrate, which learns from them where no text is given:
# cmake -DFOLDER=docs -DOUTPUT=FILE.c -P dt_text.cmake

file(GLOB files "${FOLDER}/*.md")
list(SORT files)
set(bytes "")
foreach(path ${files})
    file(READ "${path}" hex HEX)
    string(REGEX REPLACE "(................................................................)" "\\1\n" hex "${hex}")
    string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," hex "${hex}")
    string(APPEND bytes "${hex}\n")
endforeach()
file(WRITE "${OUTPUT}.new" "/* Made of docs/ by cmake/dt_text.cmake. */\n#include \"eval.h\"\n
static const unsigned char text[] = {\n${bytes}};
const char *const eval_calibration_text = (const char *)text;\nconst size_t eval_calibration_bytes = sizeof text;\n")
file(RENAME "${OUTPUT}.new" "${OUTPUT}")

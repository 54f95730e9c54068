# Pages for man and completion for bash and zsh, made from each program's --help by python/manual.py when the program is built, so
# that they can't go stale. Left out where there is no Python, or where programs of this build don't run on this machine.
include(GNUInstallDirs)

find_package(Python3 3.9 QUIET COMPONENTS Interpreter)
if(NOT Python3_Interpreter_FOUND OR CMAKE_CROSSCOMPILING)
    message(STATUS "Manual pages and shell completion are left out: Python 3.9 has to run the programs' --help")
    return()
endif()

set(DT_MANUAL "${CMAKE_BINARY_DIR}/manual") # of man/, bash/, zsh/
set(manual_pages "")
foreach(entry IN LISTS DT_PROGRAMS_HERE)
    string(REGEX REPLACE "=.*$" "" program "${entry}")
    string(REGEX REPLACE "^main$" "deeptutor" name "${program}") # as it is installed
    add_custom_command(OUTPUT "${DT_MANUAL}/man/${name}.1"
        COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/python/manual.py" ${name} "$<TARGET_FILE:${program}>"
            "${DT_MANUAL}"
        DEPENDS ${program} python/manual.py COMMENT "Manual page of ${name}" VERBATIM)
    list(APPEND manual_pages "${DT_MANUAL}/man/${name}.1")
endforeach()
add_custom_target(manual ALL DEPENDS ${manual_pages})
add_dependencies(programs manual)

set(zsh_folder site-functions)
if(CMAKE_INSTALL_PREFIX STREQUAL "/usr" AND EXISTS /etc/debian_version)
    set(zsh_folder vendor-completions) # where Debian's zsh looks
endif()
install(DIRECTORY "${DT_MANUAL}/man/" DESTINATION "${CMAKE_INSTALL_MANDIR}/man1")
install(DIRECTORY "${DT_MANUAL}/bash/" DESTINATION "${CMAKE_INSTALL_DATADIR}/bash-completion/completions")
install(DIRECTORY "${DT_MANUAL}/zsh/" DESTINATION "${CMAKE_INSTALL_DATADIR}/zsh/${zsh_folder}")

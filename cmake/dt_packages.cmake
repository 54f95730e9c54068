# Small C libraries without a CMake package of their own.
#
# dt_find_library(<name> <header> <library> <Debian package>) makes the imported target dt::<name>, or leaves it undefined and
# sets DT_INSTALL_HINT_<name> to the command that installs it. No pkg-config: a fresh machine may not have it.
function(dt_find_library name header library debian_package)
    find_path(DT_${name}_INCLUDE_DIR ${header})
    find_library(DT_${name}_LIBRARY ${library})
    mark_as_advanced(DT_${name}_INCLUDE_DIR DT_${name}_LIBRARY)
    if(DT_${name}_INCLUDE_DIR AND DT_${name}_LIBRARY)
        add_library(dt::${name} UNKNOWN IMPORTED GLOBAL)
        set_target_properties(dt::${name} PROPERTIES
            IMPORTED_LOCATION "${DT_${name}_LIBRARY}"
            INTERFACE_INCLUDE_DIRECTORIES "${DT_${name}_INCLUDE_DIR}")
    elseif(APPLE)
        set(DT_INSTALL_HINT_${name} "brew install ${name}" PARENT_SCOPE)
    else()
        set(DT_INSTALL_HINT_${name} "sudo apt-get install ${debian_package}" PARENT_SCOPE)
    endif()
endfunction()

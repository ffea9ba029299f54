# mambascope_library(kernels USES base LINKS hwy::hwy SOURCES gemm.cc ...)
#
# One library a folder of server/. USES names the folders it may include (the direction that
# tests/project/include_direction.py enforces); LINKS names libraries that are not ours, which stay
# private to the folder: its public headers do without them.
function(mambascope_library name)
  cmake_parse_arguments(ARG "" "" "USES;LINKS;SOURCES" ${ARGN})
  add_library(mambascope_${name} STATIC ${ARG_SOURCES})
  target_link_libraries(mambascope_${name} PUBLIC mambascope_options)
  foreach(used IN LISTS ARG_USES)
    target_link_libraries(mambascope_${name} PUBLIC mambascope_${used})
  endforeach()
  target_link_libraries(mambascope_${name} PRIVATE ${ARG_LINKS})
endfunction()

# mambascope_library(kernels USES base LINKS hwy::hwy SOURCES gemm.cc ... CUDA cuda/gemm.cc ...)
#
# One library a folder of server/. USES names the folders it may include (the direction that
# tests/project/include_direction.py enforces); LINKS names libraries that are not ours, which stay
# private to the folder: its public headers do without them. CUDA names the sources that exist only
# when MAMBASCOPE_CUDA is on; whoever uses the folder then sees that definition and CUDA's headers.
function(mambascope_library name)
  cmake_parse_arguments(ARG "" "" "USES;LINKS;SOURCES;CUDA" ${ARGN})
  add_library(mambascope_${name} STATIC ${ARG_SOURCES})
  target_link_libraries(mambascope_${name} PUBLIC mambascope_options)
  foreach(used IN LISTS ARG_USES)
    target_link_libraries(mambascope_${name} PUBLIC mambascope_${used})
  endforeach()
  target_link_libraries(mambascope_${name} PRIVATE ${ARG_LINKS})
  if(MAMBASCOPE_CUDA AND ARG_CUDA)
    target_sources(mambascope_${name} PRIVATE ${ARG_CUDA})
    target_compile_definitions(mambascope_${name} PUBLIC MAMBASCOPE_CUDA=1)
    target_link_libraries(mambascope_${name} PUBLIC CUDA::cudart PRIVATE CUDA::cublasLt)
  endif()
endfunction()
